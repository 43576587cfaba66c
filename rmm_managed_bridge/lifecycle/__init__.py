"""A bridge from `install` to its end."""
