"""OpenAI's HTTP interface: bodies become `GenerateRequest`s, generations OpenAI's objects and chunks."""
