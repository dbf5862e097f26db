"""What the commands are made of: arguments, prompts, the plan on paper, progress, reports. One idea per file."""
