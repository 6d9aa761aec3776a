"""What runs on the compute nodes: agent, fork server, ranks. Never imports orchestrator, submitit or wandb."""
