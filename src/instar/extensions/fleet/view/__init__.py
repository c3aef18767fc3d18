"""What is shown of a fleet: on the command line, live on a terminal, and in the dashboard."""
