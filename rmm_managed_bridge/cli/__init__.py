"""The `rmm-bridge` command: one file per verb. Verbs raise; `main` alone decides the exit code."""
