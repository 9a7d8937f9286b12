{% include "header.sh" %}
{% if nodes == 1 %}
# Start it with: bash FILE
{% else %}
# Start it on each of the {{ nodes }} nodes, with the name of the first: HEAD=node01 bash FILE
{% endif %}

{% include "body.sh" %}
{% if nodes > 1 %}
: "${HEAD:?set HEAD to the name of the first node, the same on every node}"
{% endif %}

{% if find_infiniband %}
# A container sees the cards of a fast network only if it is given them.
infiniband=()
[ ! -e /dev/infiniband ] || infiniband=(--device /dev/infiniband --cap-add IPC_LOCK)

{% endif %}
# One process a GPU. When one fails, all start again, at most {{ max_restarts }} times, from the newest checkpoint. Signals that ask
# for a stop are passed on to the processes, which save; torchrun itself then ends with 1, whatever they end with.
exec {{ prefix }}{{ python }} -m torch.distributed.run {% if nodes == 1 %}--standalone{% else %}--nnodes={{ nodes }}{% endif %} --nproc-per-node={{ ranks_per_node }} \
{% if nodes > 1 %}
  --rdzv-backend=c10d --rdzv-id={{ name }} --rdzv-endpoint="$HEAD:${PORT:-29400}" \
{% endif %}
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  --max-restarts={{ max_restarts }} --module {{ arguments }}
