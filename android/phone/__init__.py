"""What is pushed to the phone beside the run-time part of estream. The host imports none of it."""
