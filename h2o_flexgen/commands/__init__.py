"""What the commands are made of: arguments, prompts, the plan on paper, progress, measurements and reports. One idea per file."""
