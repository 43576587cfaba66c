"""Prefetch, advice and discard: what they act on, what the driver is asked, and the policies that ask for them."""
