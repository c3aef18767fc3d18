"""From a record's bytes to columns and events: tolerant, cached, followed."""
