include_guard(GLOBAL)

# epd_daemon_lock(<label> <variable>): properties of a test with that label, by which few run while another one does:
# each starts a daemon, and two cores carry three with their engines and clients. Tests of conformance and python
# compute, the others mostly wait. They begin before tests without, which fill the gaps.
function(epd_daemon_lock label variable)
  if(label MATCHES "^(conformance|python)$")
    set(lock epd_daemon_1)
  elseif(label MATCHES "^(nodes|integration)$")
    set(lock epd_daemon_2)
  else()
    set(lock epd_daemon_3)
  endif()
  set(${variable} RESOURCE_LOCK ${lock} COST 10 PARENT_SCOPE)
endfunction()
