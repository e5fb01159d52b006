"""The scheduler's pure core: events in, decisions out; no clock, no I/O, no await."""
