"""Processes that do a job together, each with a GPU: started, looked after and ended, and what they say to each other."""
