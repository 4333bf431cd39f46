"""Default values that several rooms share."""

K = 1024  # classes drawn per step
RMSE_LOG_Z = 0.15  # nats: the error of log Z̃ that a head which decides by itself keeps below
IGNORE_INDEX = -100  # the target id of an ignored position, as in torch.nn.functional.cross_entropy
