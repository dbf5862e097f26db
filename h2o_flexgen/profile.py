"""The profile command: measures this machine for the pricing of plans, and keeps the result.

    python -m h2o_flexgen.profile
    python -m h2o_flexgen.profile --quick -o machine.yaml

A table goes to stdout, followed by one JSON document, unless that is a terminal. The profile is kept in the user's cache,
where plans for this machine find it; measuring the same machine again replaces it.
"""

from h2o_flexgen.cli.main import door
from h2o_flexgen.cli.profile_request import PROGRAM, parse, request_of

main = door("profile", PROGRAM, parse, request_of)

if __name__ == "__main__":
    raise SystemExit(main())
