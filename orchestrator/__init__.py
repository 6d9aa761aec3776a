"""What runs on the login node and the batch host: plan, place, submit, supervise. Never imports torch."""
