"""Child processes of the launcher and of data workers."""
