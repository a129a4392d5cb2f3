"""What the records say where others went wrong: public bugs of serving and training stacks, each with the right answer."""
