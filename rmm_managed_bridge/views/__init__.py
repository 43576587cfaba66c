"""Arrays of another framework over the same bytes."""
