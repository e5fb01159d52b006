"""The scheduler: placement, radix trees, page ledgers and batching, standing apart from every chip."""
