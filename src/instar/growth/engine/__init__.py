"""The one engine of growth: a candidate is built beside what grows, proved, and only then takes its place."""
