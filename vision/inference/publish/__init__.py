"""`vision publish`: a model as a folder for the Hugging Face hub."""
