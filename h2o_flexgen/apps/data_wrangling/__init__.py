"""Data wrangling with a language model: are two rows the same thing, what is missing in a row, is a value wrong. The tasks,
data sets and prompts are those of fm_data_tasks (Narayan et al., "Can Foundation Models Wrangle Your Data?", VLDB 2022), which
FlexGen measured itself on; no code of theirs is here."""
