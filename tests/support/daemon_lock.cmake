include_guard(GLOBAL)

# epd_daemon_lock(<label> <variable>): properties of a test with that label, by which few run while another one does:
# each starts a daemon, and two cores carry three with their engines and clients. They begin before tests without, which
# fill the gaps.
function(epd_daemon_lock label variable)
  if(label STREQUAL python)
    set(properties RESOURCE_LOCK epd_daemon_3 COST 60)
  elseif(label MATCHES "^(conformance|nodes)$")
    set(properties RESOURCE_LOCK epd_daemon_2 COST 10)
  else()
    set(properties RESOURCE_LOCK epd_daemon_1 COST 10)
  endif()
  set(${variable} ${properties} PARENT_SCOPE)
endfunction()
