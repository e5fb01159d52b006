"""`chipmesh tune`: settings of a group that serve a load best on its chips, found by measuring.

`space`, `search` and `verdict` are pure: what to measure next, and what came of it. `tuner` has the clock,
`sites` the mesh, `request` the flags, `command` the whole.
"""
