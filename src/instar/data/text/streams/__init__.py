"""Streams of text: read forward, lane by lane."""
