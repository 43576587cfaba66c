"""Records in; text, tables and pictures out. Nothing here looks at memory itself."""
