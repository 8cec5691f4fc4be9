"""From prompts to batches: sources, rewards, environments, scheduler, ledger."""
