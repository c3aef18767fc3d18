"""User code that a config names: imported, refused where it is another user's, brought to child processes"""
