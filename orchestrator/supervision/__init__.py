"""The supervisor: hands out attempts, watches, decides. One per run, in the batch step of its allocation."""
