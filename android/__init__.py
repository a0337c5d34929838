"""EStream on a phone, from the host: what is pushed, how it is started, and what comes back. Needs adb."""
