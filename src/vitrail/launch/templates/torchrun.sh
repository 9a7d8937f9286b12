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

# One process a GPU. When one fails, all start again, at most {{ max_restarts }} times, from the newest checkpoint.
{% if nodes == 1 %}
exec {{ prefix }}{{ python }} -m torch.distributed.run --standalone --nproc-per-node={{ ranks_per_node }} \
  --max-restarts={{ max_restarts }} --module {{ arguments }}
{% else %}
exec {{ prefix }}{{ python }} -m torch.distributed.run --nnodes={{ nodes }} --nproc-per-node={{ ranks_per_node }} \
  --rdzv-backend=c10d --rdzv-id={{ name }} --rdzv-endpoint="$HEAD:${PORT:-29400}" \
  --max-restarts={{ max_restarts }} --module {{ arguments }}
{% endif %}
