"""When things move: schedules as data, their proof, their simulation and their trace."""
