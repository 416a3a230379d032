"""The rows of the table of diagnoses, by subject. Pure data; imports only `diagnosis` and what lies below it."""
