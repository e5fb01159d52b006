"""The worker: a supervisor that owns no device, and the executor process that hosts one plugin."""
