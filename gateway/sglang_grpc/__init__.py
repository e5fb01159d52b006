"""`sglang.grpc.scheduler.SglangScheduler`: routers such as smg drive this mesh as if it were one engine."""
