"""A model's output text taken apart as it comes: reasoning, content, tool calls.

Each parser has `feed` and `flush`, and gives the same however its text is cut; parsing a whole text is
feeding it at once. What is no well-formed call comes out as content: nothing that the model said is lost.
"""
