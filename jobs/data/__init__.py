"""Text to token files, and token files to samples. Without torch: what starts a run and `orc data` need none."""
