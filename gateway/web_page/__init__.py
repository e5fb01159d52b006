"""The page at the root of `openai_listen`: the mesh, its steering, a playground, recent traces."""
