"""Where weights come from: files and folders of every kind, what is made of them once, and random ones."""
