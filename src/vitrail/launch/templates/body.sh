set -eo pipefail
cd {{ folder }}
{% if setup %}

{% for line in setup %}
{{ line }}
{% endfor %}
{% endif %}
{% if credentials %}

# Passwords and tokens of URLs are not in this file.
: "${{ '{' }}{{ credentials }}:?set it to the URLs of the data with their passwords or tokens, and export it}"
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
