"""Jobs over files: lines of requests in, a record for each of them out, and what it takes to go on after a crash."""
