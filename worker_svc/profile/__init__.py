"""A recording of a live executor: its steps, what is inside of them, and the gaps between."""
