"""``python train.py fit --config config.yaml``: nothing here or in the module knows of graphs."""

from lightning.pytorch.cli import LightningCLI
from model import DigitClassifier, DigitImages

if __name__ == "__main__":
    cli = LightningCLI(DigitClassifier, DigitImages)
