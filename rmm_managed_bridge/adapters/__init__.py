"""The hooks into the frameworks, one screen each. They never import each other."""
