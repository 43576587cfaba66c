"""`rmm-bridge demo`."""
