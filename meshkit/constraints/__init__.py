"""Forms that an output must have: what they are, and how one is compiled and followed.

`form` is plain data; `matching` imports llguidance, so it is imported where a form is used, not where one is
carried.
"""
