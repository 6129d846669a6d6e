"""Attention of any model of timm: python examples/timm_attention.py MODEL IMAGE

MODEL is timm:NAME, which downloads weights, or a file of weights.
"""

import sys

import vision

model = vision.load(sys.argv[1])
print(model.predict(sys.argv[2]).top)
figure = vision.show_attention(model, sys.argv[2], methods=["attention", "rollout", "chefer"])
print(figure.save("attention.png"))
