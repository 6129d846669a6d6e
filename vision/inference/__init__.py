"""Using a trained model: loading it, predicting, exporting it."""
