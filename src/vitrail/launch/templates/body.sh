set -eo pipefail
cd {{ folder }}
{% if setup %}

{% for line in setup %}
{{ line }}
{% endfor %}
{% endif %}
{% if environment %}

# Where a variable is set already, that value is kept.
{% for item in environment %}
# {{ item.why }}
{% if item.off %}
# export {{ item.name }}="{{ item.value }}"
{% else %}
export {{ item.name }}="${{ '{' }}{{ item.name }}:-{{ item.value }}}"
{% endif %}
{% endfor %}
{% endif %}
