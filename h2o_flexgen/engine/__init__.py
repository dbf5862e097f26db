"""The running half: the engine, its lanes, its stores, and the rows that it generates for."""
