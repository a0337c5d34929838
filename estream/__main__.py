"""`python -m estream`: the command line."""

from estream.cli.main import main

raise SystemExit(main())
