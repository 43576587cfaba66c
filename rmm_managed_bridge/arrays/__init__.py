"""Arrays of any framework: where they lie, who may touch them, and which streams use them."""
