"""The record of a run as it is written: events, folders, alerts, trackers, the display."""
