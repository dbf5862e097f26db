"""A server for OpenAI's clients: requests over HTTP, gathered into blocks under a plan.

    python -m h2o_flexgen.serve --model facebook/opt-1.3b --port 8000

The address is printed when the server is ready; the last line of stdout is one JSON document, unless that is a terminal.
SIGTERM or Ctrl-C ends it when every admitted request has an answer; a second one ends it at once.
"""

from h2o_flexgen.cli.main import door
from h2o_flexgen.cli.serve_request import PROGRAM, parse, request_of

main = door("serve", PROGRAM, parse, request_of)

if __name__ == "__main__":
    raise SystemExit(main())
