"""The verbs that read a recording: one file each."""
